"""What a run will take, before it is built: memory of a device and of a machine, disk, traffic between devices."""
