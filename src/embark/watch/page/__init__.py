"""The live page: reads runs as they grow, and serves what it has read to a browser."""

from embark.watch.page.places import FolderPlace, LogFile, Place
from embark.watch.page.runs import Known, Run, Runs
from embark.watch.page.server import PageServer, serve_page

__all__ = ["FolderPlace", "Known", "LogFile", "PageServer", "Place", "Run", "Runs", "serve_page"]
