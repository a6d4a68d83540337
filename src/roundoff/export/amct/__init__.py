"""The files of AMCT (Ascend Model Compression Toolkit), so that its users can move here and back."""

from __future__ import annotations

from roundoff.export.amct.cfg import read_config as read_config
from roundoff.export.amct.config import AutoPrune as AutoPrune
from roundoff.export.amct.config import LayerConfig as LayerConfig
from roundoff.export.amct.config import Levels as Levels
from roundoff.export.amct.config import Pruning as Pruning
from roundoff.export.amct.config import QuantizeConfig as QuantizeConfig
from roundoff.export.amct.record import read_record as read_record
from roundoff.export.amct.write import write_record as write_record
from roundoff.export.amct.write_cfg import write_config as write_config
