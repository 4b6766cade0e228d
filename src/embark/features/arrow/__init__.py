"""Delimited text and Parquet, read by pyarrow: only these modules import it, and other input does without."""

from embark.errors import MissingPackage

try:
    import pyarrow  # noqa: F401
except ImportError as error:
    raise MissingPackage("pyarrow reads delimited text and Parquet", "pip install 'embark-rec[columns]'") from error
