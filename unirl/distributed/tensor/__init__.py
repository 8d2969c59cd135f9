"""The data plane: heavy fields stay where they were made, and the driver holds references. See README.md."""
