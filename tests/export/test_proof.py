"""The exported file: ONNX Runtime and onnx's reference evaluator say what it computes, our simulation must agree."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from roundoff.errors import QuantizationError
from roundoff.export.delivery.files import Folder
from roundoff.export.onnx.deployed import Deployed
from roundoff.export.onnx.export import export_fake_quant, export_onnx
from roundoff.export.onnx.kernels import became
from roundoff.export.onnx.proof import Proof, prove
from roundoff.export.onnx.runtime import Kernels, kernels, session
from roundoff.formats import choose_qparams, parse_format
from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.pipeline import quantize
from roundoff.workload.workload import Workload


@pytest.fixture(scope="module")
def int8(net, quantize, tmp_path_factory) -> tuple[Proof, QuantizedModel, Path]:
    folder = tmp_path_factory.mktemp("int8")
    model = quantize(net, "int8")
    return (
        prove(net, model, folder / "model.onnx", folder / "fp32.onnx", seconds=0),
        model,
        folder,
    )


def test_every_kernel_gives_the_codes_of_the_simulation(int8):
    proof, model, _ = int8
    values = {name for name, q in model.named() if not q.weight}
    assert {site.name for site in proof.sites} == values
    # requantization in fp32 rounds sums that are not exact in fp32 either: ties alone may fall to the other side
    assert proof.codes <= 1
    assert [
        s.name for s in proof.sites if s.by_kernel.share > 1e-3 and "pool" not in s.name
    ] == []
    assert (
        next(s for s in proof.sites if s.name == "c1/conv2d:0").by_kernel.most == 0
    )  # quantized alone, nothing computed
    assert proof.simulation_db > proof.sqnr_db + 6


def test_integer_kernels_are_counted_and_each_site_has_one(int8):
    proof, _, folder = int8
    counted = {
        name: proof.kernels.counts.get(name, 0)
        for name in ("QLinearConv", "QLinearAdd", "QGemm")
    }
    assert counted == {"QLinearConv": 3, "QLinearAdd": 1, "QGemm": 1}
    assert (
        proof.kernels.counts["QLinearGlobalAveragePool"]
        == proof.kernels.counts["QLinearAveragePool"]
        == 1
    )
    assert [row for row in proof.became if not row.integer] == []
    assert (folder / "model.onnx").stat().st_size == proof.bytes
    assert proof.notes == {}


def test_metric_agreement_and_signal_are_those_of_onnxruntime(
    int8, net, inference_session
):
    proof, _, folder = int8
    (batch,) = net.held_out
    ours, exact = (
        inference_session(folder / name).run(None, {"input": batch.numpy()})[0]
        for name in ("model.onnx", "fp32.onnx")
    )
    assert proof.samples == len(batch)
    assert proof.agreement == proof.metric == (ours.argmax(1) == exact.argmax(1)).mean()
    assert proof.metric_fp32 == 1.0
    noise = ((ours.astype(float) - exact) ** 2).sum() / (exact.astype(float) ** 2).sum()
    assert proof.sqnr_db == pytest.approx(
        -10 * np.log10(noise), abs=1e-6
    )  # both in fp64
    assert proof.latency is None


def test_the_file_is_valid_small_and_says_nothing_of_this_machine(int8):
    _, _, folder = int8
    proto = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(proto, full_check=True)
    assert [(o.domain, o.version) for o in proto.opset_import] == [("", 21)]
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    text = (folder / "model.onnx").read_bytes()
    assert str(Path(__file__).parents[2]).encode() not in text
    assert b"site-packages" not in text
    read = {name for node in proto.graph.node for name in node.input}
    assert {t.name for t in proto.graph.initializer} <= read
    assert "Clip" not in {
        n.op_type for n in proto.graph.node
    }  # ReLU6 and ReLU went into the codes
    assert "Relu" not in {n.op_type for n in proto.graph.node}
    assert "c2/conv2d" in {n.name for n in proto.graph.node}


def test_no_attribute_says_what_its_absence_means(int8):
    """Over the defaults of ONNX's own operator schemas; what is no default (strides, axes of channels) stays."""
    model, kept = onnx.load(int8[2] / "model.onnx"), set()
    for node in model.graph.node:
        defaults = onnx.defs.get_schema(
            node.op_type, model.opset_import[0].version
        ).attributes
        for attribute in node.attribute:
            known = defaults[attribute.name].default_value
            value = onnx.helper.get_attribute_value(attribute)
            assert not known.name or onnx.helper.get_attribute_value(known) != value, (
                node.name,
                attribute.name,
            )
            kept.add((node.op_type, attribute.name))
    assert {("Conv", "pads"), ("DequantizeLinear", "axis")} <= kept


def test_the_reference_evaluator_of_onnx_agrees_with_the_simulation(int8, net):
    _, model, folder = int8
    (batch,) = net.held_out
    (found,) = ReferenceEvaluator(str(folder / "model.onnx")).run(
        None, {"input": batch[:2].numpy()}
    )
    with torch.no_grad():
        wanted = model(batch[:2])
    weights = model.model.fc.weight.detach().abs().sum(1)
    step = float(model.quantizer("pool/adaptive_avg_pool2d").scale) * float(
        weights.max()
    )
    # a code more or less in each channel that the last layer reads, at most
    assert (torch.from_numpy(found) - wanted).abs().max() <= step


def test_the_fake_quantized_file_is_the_simulation_in_plain_arithmetic(
    table, quantize, tmp_path, inference_session
):
    model = quantize(table, "fp8_e4m3fn")
    export_fake_quant(table, model, tmp_path / "fake.onnx")
    operators = {n.op_type for n in onnx.load(tmp_path / "fake.onnx").graph.node}
    assert not operators & {"QuantizeLinear", "DequantizeLinear"}
    batch = table.batches[1]
    (found,) = inference_session(tmp_path / "fake.onnx").run(
        None, {"input": batch.numpy()}
    )
    with torch.no_grad():
        wanted = model(batch)
    error = (torch.from_numpy(found) - wanted).square().sum() / wanted.square().sum()
    # sums in another order differ by 2**-24 of their terms; where that crosses a tie the value moves by 2**-4 of itself,
    # which of 1,792 hidden values some two may do: 2 / 1792 * 2**-8
    assert error < 5e-6


def test_packed_weights_are_half_as_large_and_reach_integer_kernels(
    table, quantize, tmp_path, inference_session
):
    model = quantize(table, "w4a8")
    sizes, outputs = [], []
    for pack in (False, True):
        path = export_onnx(table, Deployed(model), tmp_path / f"{pack}.onnx", pack=pack)
        sizes.append(sum(len(t.raw_data) for t in onnx.load(path).graph.initializer))
        outputs.append(
            inference_session(path).run(None, {"input": table.batches[0].numpy()})[0]
        )
        assert kernels(path).integer == {"MatMulIntegerToFloat": 2}
    codes = sum(p.numel() for p in model.model.parameters() if p.ndim == 2)
    assert sizes[0] - sizes[1] == codes // 2
    assert np.array_equal(*outputs)


def test_weights_in_groups_become_products_with_four_bits(
    table, quantize, tmp_path, inference_session
):
    model = quantize(table, "w4g32")
    deployed = Deployed(model)
    path = export_onnx(table, deployed, tmp_path / "groups.onnx", pack=True)
    assert kernels(path).integer == {"MatMulNBits": 2}
    # else activations are rounded too
    ready = inference_session(path, qdq_matmulnbits_accuracy_level="1")
    (found,) = ready.run(None, {"input": table.batches[1].numpy()})
    with torch.no_grad():
        wanted = model(table.batches[1])
    # sums of 96 products in fp32, in any order: 96 * 2**-24 of the sum of their magnitudes, which is under 8 here
    assert (torch.from_numpy(found) - wanted).abs().max() < 8 * 96 * 2.0**-24


def test_what_onnx_cannot_express_is_a_row_with_the_reason_and_stays_arithmetic(
    table, quantize
):
    model = quantize(table, "mxfp4")
    deployed, batch = Deployed(model), table.batches[0]
    with torch.no_grad():
        assert torch.equal(deployed(batch), model(batch))
    reason = "mxfp4: ONNX has no operator that chooses the scales of blocks while the model runs"
    assert deployed.reasons == {"table/embedding": reason, "/relu": reason}
    rows = became(model, deployed, Kernels({}, ()))
    assert {row.site for row in rows} == set(model.routes)
    assert [row.reason for row in rows if row.site == "b/linear"] == [reason]


def test_a_format_that_is_slow_in_onnx_runtime_is_a_row(table, quantize):
    slow = Deployed(quantize(table, "w8a16")).slow
    reason = "int16_asym: ONNX Runtime's integer kernels on CPUs multiply 8 bits, others compute in fp32"
    assert slow == {"table/embedding": reason, "/relu": reason}


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.sum() > 0 else self.a(-x)


class _Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh(x @ x.mT)


def test_a_model_that_cannot_be_exported_is_an_error_with_the_exporters_reason(
    tmp_path,
):
    workload = Workload(_Unknown(), [torch.ones(2, 4, 4)], name="odd")
    with pytest.raises(
        QuantizationError, match="odd: this model cannot be written as ONNX"
    ) as caught:
        export_onnx(workload, workload.model.eval(), tmp_path / "x.onnx")
    assert "eigvalsh" in str(caught.value) or "eigh" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_what_the_exporter_says_of_itself_is_kept_from_the_user(
    tmp_path, capfd, caplog
):
    """It warns of what it cannot fold, and prints graphs that it gives up; logging is as before."""
    workload = Workload(_Branching(), [torch.ones(2, 4, 4)])
    below = logging.root.manager.disable
    export_onnx(workload, workload.model.eval(), tmp_path / "x.onnx")
    assert capfd.readouterr() == ("", "")
    assert [
        record for record in caplog.records if record.levelno > logging.DEBUG
    ] == []  # torch.__trace goes by no level
    assert logging.root.manager.disable == below


def test_a_missing_library_is_an_error_that_names_the_extra(net, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(
        QuantizationError,
        match=r"ONNX files need onnx, .*\n.*\n  do: pip install 'roundoff\[onnx\]'",
    ):
        export_onnx(net, net.model, tmp_path / "x.onnx")


def test_a_batch_of_one_sample_leaves_the_batch_axis_free(tmp_path, inference_session):
    workload = Workload(nn.Linear(4, 2).eval(), [torch.ones(1, 4)], name="one")
    path = export_onnx(workload, workload.model, tmp_path / "x.onnx")
    (found,) = inference_session(path).run(None, {"input": np.ones((5, 4), np.float32)})
    assert found.shape == (5, 2)


def test_a_dynamic_scale_is_that_of_dynamic_quantize_linear():
    """Our rule for dynamic asymmetric int8 against onnx's reference: equal but for the last bit of the scale."""
    node = onnx.helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])
    values = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None])]
    outputs = [
        onnx.helper.make_tensor_value_info(n, t, None)
        for n, t in (("y", 2), ("s", 1), ("z", 2))
    ]
    ready = ReferenceEvaluator(
        onnx.helper.make_model(onnx.helper.make_graph([node], "g", values, outputs))
    )
    generator = torch.Generator().manual_seed(0)
    for shift in (-9.0, -1.0, 0.0, 0.3, 9.0):  # zero points at both ends and between
        x = torch.randn(257, generator=generator) + shift
        _, scale, zero = ready.run(None, {"x": x.numpy()})
        ours = choose_qparams(x, parse_format("int8_asym"))
        assert abs(float(ours.scale) / float(scale) - 1) <= 2.0**-23
        assert float(ours.zero_point) + 128 == float(zero)


class InPlace(nn.Module):
    """Writes into its own values, as many networks do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
        )

    def forward(self, x):
        x = torch.relu_(self.first(x))
        y = self.second(x)
        y += x
        return y.relu_().mean((2, 3))


def test_a_model_that_writes_in_place_is_exported(tmp_path, inference_session):
    torch.manual_seed(0)
    model, batches = InPlace().eval(), [torch.randn(4, 3, 8, 8) for _ in range(2)]
    workload = Workload(model, batches)
    small = quantize(model, "int8", batches)
    path = export_onnx(workload, Deployed(small), tmp_path / "model.onnx")
    session = inference_session(path)
    (found,) = session.run(None, {session.get_inputs()[0].name: batches[0].numpy()})
    with torch.no_grad():
        want = small(batches[0])
    # one code of 255 steps over the range of the output, where a kernel rounds the last bit in another way
    torch.testing.assert_close(
        torch.from_numpy(found), want, rtol=0, atol=float(want.amax()) / 255
    )


def test_a_transposed_convolution_in_groups_is_exported(tmp_path, inference_session):
    """Its weight has a scale for each channel of a group, its bias one for each channel."""
    torch.manual_seed(0)
    model, batches = (
        nn.Sequential(nn.ConvTranspose2d(4, 6, 2, 2, groups=2), nn.Conv2d(6, 2, 1)),
        [torch.randn(4, 4, 5, 5)],
    )
    small = quantize(model, "int8", batches)
    path = export_onnx(
        Workload(model, batches), Deployed(small), tmp_path / "model.onnx"
    )
    (found,) = inference_session(path).run(None, {"input": batches[0].numpy()})
    with torch.no_grad():
        want = small(batches[0])
    # the last kernel may round the last bit of a value between in another way: one code of 255, through a convolution
    torch.testing.assert_close(
        torch.from_numpy(found), want, rtol=0, atol=float(want.abs().amax()) * 4 / 255
    )


@pytest.mark.parametrize("fmt", ["w8", "w8g32"])
def test_weights_stored_as_uint8_by_onnx_runtime_have_their_zero_points(
    fmt, tmp_path, inference_session
):
    """Where it converts int8 to uint8 it needs a zero point for each scale."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(36, 4)
    ).eval()
    workload = Workload(model, [torch.randn(4, 4, 5, 5)])
    simulation = quantize(workload, fmt)
    path = export_onnx(workload, Deployed(simulation), tmp_path / "model.onnx")
    (batch,) = workload.batches
    (output,) = inference_session(path).run(None, {"input": batch.numpy()})
    with torch.no_grad():
        wanted = simulation(batch)
    # sums of 36 products in fp32, in any order
    torch.testing.assert_close(torch.from_numpy(output), wanted, rtol=0, atol=1e-5)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


def test_a_recurrent_layer_whose_last_step_is_read_runs(tmp_path):
    torch.manual_seed(0)
    workload = Workload(Recurrent().eval(), [torch.randn(16, 6, 8)])
    model = quantize(workload, "int8")
    files = (tmp_path / "model.onnx", tmp_path / "fp32.onnx")
    proof = prove(workload, model, *files, seconds=0)
    assert proof.simulation_db > proof.sqnr_db + 6
    assert proof.bytes < proof.bytes_fp32


def test_a_file_that_is_no_model_is_an_error_and_nothing_is_logged(tmp_path, capfd):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no protocol buffer")
    with pytest.raises(QuantizationError, match="cannot load this file") as caught:
        session(path)
    assert "model.onnx" in str(caught.value)
    assert caught.value.got
    assert capfd.readouterr().err == ""


def test_the_row_of_a_file_says_why_it_could_not_be_written(tmp_path):
    folder = Folder(tmp_path)

    def write(path):
        path.write_bytes(b"no protocol buffer")
        session(path)

    assert folder.write("model.onnx", write) is None
    folder.withdraw("model.onnx", "")
    (row,) = [row for row in folder.rows() if row.name == "model.onnx"]
    assert row.bytes is None
    reason = "ONNX Runtime cannot load this file: "
    assert row.reason.startswith(reason)
    assert len(row.reason) > len(reason)
    assert str(tmp_path) not in row.reason  # the folder that is written into is moved
