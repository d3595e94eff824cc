"""Reports: tables, plots and a page of many runs, in one folder that can be read and made again."""

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
    Statement,
    TableSpec,
)
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
    "Statement",
    "Table",
    "TableSpec",
    "build_table",
    "environment",
    "history_table",
    "load_report",
    "plot_history",
    "rebuild",
    "write_report",
]
