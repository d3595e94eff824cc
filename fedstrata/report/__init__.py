"""Reports: tables, plots and a page of many runs, in one folder that can be read and made again."""

from fedstrata.report.compare import compare
from fedstrata.report.folder import Report, environment, load_report, rebuild, write_report
from fedstrata.report.plots import plot_history
from fedstrata.report.records import ReportError, RunRecord
from fedstrata.report.specs import (
    Claim,
    Column,
    Definition,
    PaperClaims,
    PlotSpec,
    Reference,
    Split,
    Statement,
    TableSpec,
)
from fedstrata.report.split import split_of
from fedstrata.report.tables import Table, build_table, history_table

__all__ = [
    "Claim",
    "Column",
    "Definition",
    "PaperClaims",
    "PlotSpec",
    "Reference",
    "Report",
    "ReportError",
    "RunRecord",
    "Split",
    "Statement",
    "Table",
    "TableSpec",
    "build_table",
    "compare",
    "environment",
    "history_table",
    "load_report",
    "plot_history",
    "rebuild",
    "split_of",
    "write_report",
]
