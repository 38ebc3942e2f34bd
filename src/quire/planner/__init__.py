"""What a model needs and what hardware gives: devices, calculators, and the plan that follows from them."""
