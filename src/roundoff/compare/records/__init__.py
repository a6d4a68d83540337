"""What recordings hold: rows and their tensors, the calls' arguments, and calls run again."""
