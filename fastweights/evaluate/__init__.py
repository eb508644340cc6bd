"""What a trained model can do, measured: perplexity by context length, with the amount of evidence beside every number."""
