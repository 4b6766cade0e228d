"""Id maps and embedding vectors as Parquet, for other programs to read."""

import embark.features.arrow  # noqa: F401 - says so if pyarrow is missing
