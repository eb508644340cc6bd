"""From text to a trained model: documents, tokens, packed batches, presets, and the Trainer."""
