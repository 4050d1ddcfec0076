"""A report on plans or on a run: one HTML page that loads nothing, its data, and a trace."""

from dynapar.report.gather import Question as Question
from dynapar.report.gather import gather as gather
from dynapar.report.page import page as page
from dynapar.report.source import open_source as open_source
from dynapar.report.trace import write_trace as write_trace
