"""The mathematics of rules and attacks: pure functions of tensors that know nothing of Lightning."""
