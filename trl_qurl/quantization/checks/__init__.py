"""What quantization refuses, before slow work starts: patterns, shapes, models, directories."""
