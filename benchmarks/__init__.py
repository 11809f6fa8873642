"""What the programs cost, measured beside the usual way of doing the same."""
