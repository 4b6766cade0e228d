"""The live page: reads runs as they grow, and serves what it has read to a browser."""

from embark.dashboard.runs import Known, Run, Runs
from embark.dashboard.server import PageServer, serve_page
from embark.report.locations import FolderPlace, LogFile, Place

__all__ = ["FolderPlace", "Known", "LogFile", "PageServer", "Place", "Run", "Runs", "serve_page"]
