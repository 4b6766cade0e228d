"""A model in numbers, with neither torch nor jax: sizes, work, shardings, layouts, engines. Planner and trainers use
it. May import store and below."""
