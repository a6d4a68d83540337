"""Files and operators that mean harm, and the commands that read them."""
