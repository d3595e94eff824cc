"""Reports: tables, plots and a page of many runs, in one folder that can be read and made again."""

from typing import TYPE_CHECKING

from fedstrata.support.lazy import lazy

if TYPE_CHECKING:  # and for `lazy`: who defines a table needs no Matplotlib
    from fedstrata.lab.report.compared import compare as compare
    from fedstrata.lab.report.folder import Report as Report
    from fedstrata.lab.report.folder import environment as environment
    from fedstrata.lab.report.folder import load_report as load_report
    from fedstrata.lab.report.folder import rebuild as rebuild
    from fedstrata.lab.report.folder import write_report as write_report
    from fedstrata.lab.report.plots import plot_history as plot_history
    from fedstrata.lab.report.records import ReportError as ReportError
    from fedstrata.lab.report.records import RunRecord as RunRecord
    from fedstrata.lab.report.specs import Claim as Claim
    from fedstrata.lab.report.specs import Column as Column
    from fedstrata.lab.report.specs import Definition as Definition
    from fedstrata.lab.report.specs import PaperClaims as PaperClaims
    from fedstrata.lab.report.specs import PlotSpec as PlotSpec
    from fedstrata.lab.report.specs import Reference as Reference
    from fedstrata.lab.report.specs import Split as Split
    from fedstrata.lab.report.specs import Statement as Statement
    from fedstrata.lab.report.specs import TableSpec as TableSpec
    from fedstrata.lab.report.split import split_of as split_of
    from fedstrata.lab.report.tables import Table as Table
    from fedstrata.lab.report.tables import build_table as build_table
    from fedstrata.lab.report.tables import history_table as history_table
    from fedstrata.lab.report.trials import plot_profiles as plot_profiles
    from fedstrata.lab.report.trials import plot_trials as plot_trials
else:
    __getattr__, __dir__ = lazy(__name__)
