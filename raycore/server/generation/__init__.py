"""What all dialects that generate text share: parameters, limits, running prompts, log probabilities."""
