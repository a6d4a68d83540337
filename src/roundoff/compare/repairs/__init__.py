"""Which small change would make a wrong value right: changes are tried, by running calls again."""
