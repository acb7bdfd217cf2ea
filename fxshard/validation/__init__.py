"""What measures: a tracker, numerics beside eager, real ranks; it never predicts."""
