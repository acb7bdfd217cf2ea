"""fxshard in the trainers that people run. Each file imports its framework when it is used."""
