"""AMCT's files in protobuf's text format, read so that an error names the line.

AMCT merges its files: of a field that stands twice it keeps the last, of two algorithms
that exclude each other too, without a word. Here both are errors with both lines.

The tables hold the messages, fields, numbers and defaults of AMCT 1.1's protobuf files.
One line a message: ``field=NUMBER`` then ``:`` for optional, ``!`` required, ``*``
repeated, the type, a default in parentheses, and ``|group`` for fields of which only one
may be given. Numbers order what is written.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

from roundoff import foreign
from roundoff.errors import QuantizationError, did_you_mean, nearest
from roundoff.files import write_text

_RECORD = """
ScaleOffsetRecord record=1*MapFiledEntry prune_record=2*PruneRecord
MapFiledEntry key=1:string value=2:SingleLayerRecord kv_cache_value=3:SingleLayerKVCacheRecord
SingleLayerRecord scale_d=1:float offset_d=2:int32 scale_w=3*float offset_w=4*int32 shift_bit=5*uint32
 tensor_balance_factor=6*float skip_fusion=9:bool dst_type=10:string(INT8) act_type=11:string(INT8)
 wts_type=12:string(INT8) fakequant_precision_mode=13:string(DEFAULT) scale_h=21:float offset_h=22:int32
 scale_r=23*float offset_r=24*int32
SingleLayerKVCacheRecord scale=1*float offset=2*int32
PruneRecord producer=1*PruneNode consumer=2*PruneNode selective_prune=3:PruneNode
PruneNode name=1!string attr=2*AttrProto
AttrProto name=1:string type=2:AttrType f=3:float i=4:int64 s=5:bytes floats=6*float ints=7*int64 strings=8*bytes
enum AttrType UNDEFINED=0 FLOAT=1 INT=2 STRING=3 FLOATS=4 INTS=5 STRINGS=6
"""
_CALIBRATION = """
AMCTConfig batch_num=1:uint32(1) activation_offset=2:bool(true) skip_layers=10*string skip_layer_types=11*string
 fakequant_precision_mode=21:FakequantPrecisionMode common_config=50:CalibrationConfig
 override_layer_types=51*OverrideLayerType override_layer_configs=100*OverrideLayer do_fusion=200:bool(true)
 skip_fusion_layers=201*string
OverrideLayerType layer_type=1!string calibration_config=2!CalibrationConfig
OverrideLayer layer_name=1!string calibration_config=2!CalibrationConfig
CalibrationConfig arq_quantize=13:ARQuantize|weight ada_quantize=15:ADAquantize|weight
 ifmr_quantize=100:FMRQuantize|activation hfmg_quantize=101:HFMGQuantize|activation dmq_balancer=200:DMQBalancer
ARQuantize channel_wise=1:bool quant_bits=10:uint32(8)
ADAquantize num_iteration=1:uint32(10000) reg_param=2:float(0.01) beta_range_start=3:float(20)
 beta_range_end=4:float(2) warm_start=5:float(0.2) channel_wise=10:bool
DMQBalancer migration_strength=1:float(0.5)
FMRQuantize search_range_start=1:float(0.7) search_range_end=2:float(1.3) search_step=3:float(0.01)
 max_percentile=4:float(0.999999) min_percentile=5:float(0.999999) asymmetric=6:bool dst_type=10:DataType(INT8)
HFMGQuantize num_of_bins=1:uint32(4096) asymmetric=2:bool dst_type=10:DataType(INT8)
enum DataType INT8=1 INT16=2
enum FakequantPrecisionMode FORCE_FP16_QUANT=1
"""
_KV_CACHE = """
AMCTQuantCaliConfig batch_num=1:uint32(1) activation_offset=2:bool(true) kv_cache_quant_config=10:CommonCalibrationConfig
 override_layers_configs=110*OverrideLayer
CommonCalibrationConfig quant_layers=1*string calibration_config=2:CalibrationConfig
OverrideLayer layer_name=1!string kv_data_quant_config=2:CalibrationConfig
CalibrationConfig ifmr_quantize=1:FMRQuantize|activation hfmg_quantize=2:HFMGQuantize|activation
FMRQuantize search_range_start=1:float(0.7) search_range_end=2:float(1.3) search_step=3:float(0.01)
 max_percentile=4:float(0.999999) min_percentile=5:float(0.999999) asymmetric=6:bool
 quant_granularity=11:QuantGranularity(per_tensor)
HFMGQuantize num_of_bins=1:uint32(4096) asymmetric=2:bool quant_granularity=11:QuantGranularity(per_tensor)
enum QuantGranularity per_tensor=0 per_channel=1
"""
_RETRAIN = """
AMCTRetrainConfig batch_num=1:uint32(1) retrain_data_quant_config=2:RetrainDataQuantConfig
 retrain_weight_quant_config=3:RetrainWeightQuantConfig skip_layers=4*string override_layer_configs=5*RetrainOverrideLayer
 skip_layer_types=6*string override_layer_types=7*RetrainOverrideLayerType prune_config=8:PruneConfig
 regular_prune_skip_layers=9*string regular_prune_skip_types=10*string quant_skip_layers=11*string
 quant_skip_types=12*string fakequant_precision_mode=21:FakequantPrecisionMode
RetrainDataQuantConfig ulq_quantize=13:ActULQquantize
ActULQquantize clip_max_min=1:ClipMaxMin fixed_min=2:bool dst_type=3:DataType(INT8)
ClipMaxMin clip_max=3!float clip_min=5!float
RetrainWeightQuantConfig arq_retrain=1:ARQRetrain|weight ulq_retrain=2:WtsULQRetrain|weight
ARQRetrain dst_type=1:DataType(INT8) channel_wise=2:bool
WtsULQRetrain dst_type=1:DataType(INT8) channel_wise=2:bool
RetrainOverrideLayer layer_name=1!string retrain_data_quant_config=2:RetrainDataQuantConfig
 retrain_weight_quant_config=3:RetrainWeightQuantConfig prune_config=4:PruneConfig
RetrainOverrideLayerType layer_type=1!string retrain_data_quant_config=2:RetrainDataQuantConfig
 retrain_weight_quant_config=3:RetrainWeightQuantConfig prune_config=4:PruneConfig
PruneConfig filter_pruner=1:FilterPruner|pruner n_out_of_m_pruner=2:NOutOfMPruner|pruner
FilterPruner balanced_l2_norm_filter_prune=1:BalancedL2NormFilterPruner
BalancedL2NormFilterPruner prune_ratio=1!float ascend_optimized=2:bool(true)
NOutOfMPruner l1_selective_prune=1:L1SelectivePruner
L1SelectivePruner n_out_of_m_type=1:NOutOfMType(M4N2) update_freq=2:uint32(0)
enum DataType INT4=0 INT8=1 INT16=2
enum FakequantPrecisionMode FORCE_FP16_QUANT=1
enum NOutOfMType M4N2=0
"""
_AUTO_PRUNE = """
AutoChannelPruneConfig compress_ratio=1!float ascend_optimized=2:bool(true) max_prune_ratio=3:float(1.0)
 test_iteration=4:int64(1) override_prune_cfg=10:string
"""

#: file → (its messages, the outermost one)
FILES = {
    "record": (_RECORD, "ScaleOffsetRecord"),
    "calibration": (_CALIBRATION, "AMCTConfig"),
    "kv_cache": (_KV_CACHE, "AMCTQuantCaliConfig"),
    "retrain": (_RETRAIN, "AMCTRetrainConfig"),
    "auto_prune": (_AUTO_PRUNE, "AutoChannelPruneConfig"),
}
_FIELD = re.compile(
    r"(?P<name>\w+)=(?P<number>\d+)(?P<label>[:!*])(?P<type>\w+)(?:\((?P<default>[^)]*)\))?(?:\|(?P<group>\w+))?"
)
_SCALARS = {
    "float": 2,
    "int64": 3,
    "int32": 5,
    "bool": 8,
    "string": 9,
    "bytes": 12,
    "uint32": 13,
}
_LABELS = {":": 1, "!": 2, "*": 3}  # as FieldDescriptorProto numbers both


@lru_cache(maxsize=8)
def message_class(file: str) -> Any:
    """Return the protobuf class of a file's outermost message.

    Raises:
        QuantizationError: protobuf is missing.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ModuleNotFoundError as error:
        raise QuantizationError(
            "AMCT's text files need protobuf, which is not installed",
            do="pip install 'roundoff[onnx]'",
        ) from error
    table, outermost = FILES[file]
    proto = descriptor_pb2.FileDescriptorProto(
        name=f"{file}.proto", package=file, syntax="proto2"
    )
    lines = table.strip().replace("\n ", " ").splitlines()
    enums = {line.split()[1] for line in lines if line.startswith("enum ")}
    for line in lines:
        name, *fields = line.split()
        if name == "enum":
            enum = proto.enum_type.add(name=fields[0])
            for value in fields[1:]:
                enum.value.add(
                    name=value.partition("=")[0], number=int(value.partition("=")[2])
                )
        else:
            _add_message(proto.message_type.add(name=name), fields, enums, file)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName(f"{file}.{outermost}")
    )


def _add_message(
    message: Any, fields: list[str], enums: set[str], package: str
) -> None:
    for text in fields:
        part = _FIELD.fullmatch(text)
        if part is None:  # a slip in the table above
            raise ValueError(text)
        field = message.field.add(
            name=part["name"], number=int(part["number"]), label=_LABELS[part["label"]]
        )
        if part["type"] in _SCALARS:
            field.type = _SCALARS[part["type"]]
        else:
            field.type = 14 if part["type"] in enums else 11
            field.type_name = f".{package}.{part['type']}"
        if part["default"]:
            field.default_value = part["default"]
        if part["group"]:
            groups = [group.name for group in message.oneof_decl]
            if part["group"] not in groups:
                message.oneof_decl.add(name=part["group"])
            field.oneof_index = [*groups, part["group"]].index(part["group"])


# A string that no quote ends goes to the end of its line, so that the time is in proportion
# to the text.
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<string>"(?:[^"\\\n]|\\.)*+"?|'(?:[^'\\\n]|\\.)*+'?)|(?P<name>[A-Za-z_]\w*)"""
    r"""|(?P<open>[{<])|(?P<close>[}>])|(?P<rest>[^\s{}<>#"']+?(?=[\s{}<>#"':;,\[\]]|$)|.)"""
)

_PLACE = re.compile(r"^(\d+:\d+ : (?:'.*': )?)+", re.DOTALL)

#: Where a field stands: ``("record", 2, "value", 0, "scale_d", 0)``.
_Path = tuple[str | int, ...]
#: The path of a field → its line, counted from 1.
Lines = dict[_Path, int]


def read_text(path: str | Path, file: str) -> tuple[Any, Lines]:
    """Return the message in a file, and the line of each field.

    Args:
        path: the file.
        file: its kind, a key of ``FILES``.

    Raises:
        QuantizationError: naming the line: an unknown field (with the nearest), one
            that may stand once and stands twice, two of which only one may be given, a
            value of another type, a required field that is missing.
    """
    try:
        text = foreign.read_text(Path(path), "utf-8-sig")
    except (OSError, ValueError) as error:
        raise QuantizationError(
            f"not a readable file: {error}", where=str(path)
        ) from error
    return parse_text(text, file, str(path))


def parse_text(text: str, file: str, where: str) -> tuple[Any, Lines]:
    """Do :func:`read_text` for a text."""
    message = message_class(file)()
    from google.protobuf import text_format

    lines = _FieldLines(message.DESCRIPTOR, where).walk(text)
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        line = error.GetLine()
        # protobuf puts place and line in front
        problem = _PLACE.sub("", str(error))
        raise QuantizationError(
            f"not {_KINDS[file]}: {problem}",
            where=f"{where}, line {line}" if line else where,
            got=_quoted_line(text, line) if line else None,
        ) from error
    missing = message.FindInitializationErrors()
    if missing:
        raise QuantizationError(
            f"not {_KINDS[file]}: {missing[0]} is missing",
            where=where,
            expected=", ".join(missing),
        )
    return message, lines


def _quoted_line(text: str, line: int) -> str:
    """Return the beginning of a line; of the last one where the file has fewer."""
    lines = text.splitlines() or [""]
    last = text.count("\n") + 1
    return repr(lines[min(line, last) - 1].strip()[:60])


def write_message(message: Any, path: str | Path) -> None:
    """Write a message in the text format."""
    from google.protobuf import text_format

    write_text(path, text_format.MessageToString(message, as_utf8=True))


_KINDS = {
    "record": "an AMCT record",
    "calibration": "an AMCT calibration configuration",
    "kv_cache": "an AMCT configuration of the KV cache",
    "retrain": "an AMCT retrain configuration",
    "auto_prune": "an AMCT configuration of automatic pruning",
}


class _FieldLines:
    """Walks the fields of a text; ``lines`` gets the line of each.

    Stops, without an error, at what is no text format at all: the parser reports that.
    """

    def __init__(self, descriptor: Any, where: str) -> None:
        self.where = where
        self.lines: Lines = {}
        self.counts: Counter[_Path] = Counter()
        #: The open messages, outermost first, each with its path.
        self.open: list[tuple[Any, _Path]] = [(descriptor, ())]
        #: The message of the field that was named last.
        self.pending: tuple[Any, _Path] | None = None

    def walk(self, text: str) -> Lines:
        before = ""
        next_line = 1
        for token in _TOKEN.finditer(text):
            line = next_line
            next_line += token[0].count("\n")
            kind = token.lastgroup
            if kind == "space":
                continue
            if kind == "open" and not self._enter():
                break
            if kind == "close" and not self._leave():
                break
            # the name of a value comes after a colon
            if kind == "name" and before not in (":", "-"):
                is_in_list = before in ("[", ",")
                if not self._field(token[0], line, is_in_list):
                    continue
            before = token[0] if kind == "rest" else ""
        return self.lines

    def _enter(self) -> bool:
        if self.pending is None:
            return False
        self.open.append(self.pending)
        self.pending = None
        return True

    def _leave(self) -> bool:
        self.open.pop()
        return bool(self.open)

    def _field(self, name: str, line: int, is_in_list: bool) -> bool:
        """Enter a field. Return False for a name inside a list of values."""
        descriptor, path = self.open[-1]
        field = descriptor.fields_by_name.get(name)
        where = f"{self.where}, line {line}"
        if field is None:
            if is_in_list:
                return False
            raise _unknown(name, descriptor, where)
        key = (*path, name, self.counts[(*path, name)])
        self.counts[key[:-1]] += 1
        _check_once(field, key, self.lines, where)
        self.lines[key] = line
        self.pending = None
        if field.message_type is not None:
            self.pending = (field.message_type, key)
        return True


def _unknown(name: str, descriptor: Any, where: str) -> QuantizationError:
    fields = list(descriptor.fields_by_name)
    return QuantizationError(
        f"an unknown field: {name}",
        where=where,
        expected=", ".join(fields),
        do=did_you_mean(nearest(name, fields, at_most=1)),
    )


def _check_once(field: Any, key: _Path, lines: Lines, where: str) -> None:
    """Raise ``QuantizationError`` for a second field, or a second one of its group."""
    first = lines.get((*key[:-1], 0))
    if first is not None and not _is_repeated(field):
        raise QuantizationError(
            f"{field.name} stands twice",
            where=where,
            got=f"the first is at line {first}",
            do="keep one: AMCT would take the last without a word",
        )
    group = field.containing_oneof
    for other in group.fields if group is not None else ():
        line = lines.get((*key[:-2], other.name, 0))
        if line is not None and other.name != field.name:
            raise QuantizationError(
                f"{field.name} and {other.name} exclude each other",
                where=where,
                got=f"{other.name} at line {line}",
                do="keep one: AMCT would take the last without a word",
            )


def _is_repeated(field: Any) -> bool:
    if hasattr(field, "is_repeated"):  # protobuf 6 on
        return bool(field.is_repeated)
    return bool(field.label == field.LABEL_REPEATED)
