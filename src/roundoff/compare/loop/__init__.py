"""What is not an operator's fault: data, loaded parameters, updates, the order of the loop."""
