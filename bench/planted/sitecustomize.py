"""Plants the defect that `serving_soak.py --plant` names in processes that a planted one starts anew."""

import os

if os.environ.get("EMBARK_SOAK_PLANT"):
    import serving_soak_hooks

    serving_soak_hooks.plant_defect(os.environ["EMBARK_SOAK_PLANT"])
