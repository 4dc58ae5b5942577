"""``python -m scripts COMMAND``."""

from scripts.cli import main
from scripts.docker.client import with_docker_errors
from scripts.errors import run

run(with_docker_errors(main))
