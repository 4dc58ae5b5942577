"""The database of known-bad versions and settings, in ``rows/*.toml``, matched with versions or a log.

May import ``cleanup``, ``accelerator``, ``memory``, ``telemetry``, ``config``, ``inputs`` and ``errors``.
"""

from rlhf_stack.known_bad.first_error import FirstError, first_error
from rlhf_stack.known_bad.log_file import LogText, read_log
from rlhf_stack.known_bad.matching import Environment, LastError, accelerator_of, explain, judge, last_error
from rlhf_stack.known_bad.model import MalformedRow, Row, load
from rlhf_stack.known_bad.package_list import FORMAT_NAMES, PackageList, freeze, read_versions
