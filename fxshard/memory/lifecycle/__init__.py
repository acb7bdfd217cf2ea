"""What a rank holds outside of the step: while it is set up, loads a checkpoint, and saves one."""
