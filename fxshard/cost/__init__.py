"""What a program costs on a given hardware, estimated without running anything."""
