"""The files of AMCT (Ascend Model Compression Toolkit), so that its users can move here and back."""

from __future__ import annotations

from roundoff.export.amct.record import read_record as read_record
from roundoff.export.amct.write import write_record as write_record
