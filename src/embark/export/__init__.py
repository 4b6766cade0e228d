"""A trained run as an artifact that scores raw rows: its format, writing it, opening it. No torch. May import data and
below."""
