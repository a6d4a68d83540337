"""AMCT's files (Ascend Model Compression Toolkit), so that its users can move here and back."""
