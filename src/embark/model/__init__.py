"""A model in numbers, for planner and trainers: sizes, work, shardings, layouts, engines. Neither torch nor jax; may
import store and below."""
