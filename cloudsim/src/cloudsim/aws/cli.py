"""`aws`: the real AWS CLI in this process, over moto."""

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import botocore.waiter
from awscli.clidriver import create_clidriver
from botocore.loaders import create_loader

from cloudsim.account import AnsweredBy, Call
from cloudsim.aws.account import HOME_REGION, AwsAccount
from cloudsim.aws.api import hook
from cloudsim.state import Clock, Refusal


class AwsCli:
    """The real AWS CLI, which parses, validates, queries and prints by itself; only AWS's side is simulated."""

    name = "aws"
    answered_by: AnsweredBy = "real"

    def __init__(self, account: AwsAccount, denial: Callable[[str], str] = lambda action: "",
                 start_session: Callable[[AwsAccount, Call], str] | None = None) -> None:
        """`denial` returns why the caller may not perform an action, or an empty text. `start_session` answers Systems
        Manager, for which the CLI would start a program of Amazon's."""
        self.account, self.denial, self.start_session = account, denial, start_session
        self.body = account.folder / "body"  # The file of an answer that goes to /dev/stdout.

    @cached_property
    def driver(self) -> Any:
        """The CLI's driver, which is cached because it registers hundreds of handlers and reads AWS's models."""
        driver = create_clidriver()
        session = driver.session
        session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
        hook(self.account, session, self.denial)
        create = cache(session.create_client)
        # Each client would read the model of its service.
        session.create_client = lambda service, region_name=None, **options: create(
            service, region_name or session.get_config_variable("region"), **options)
        return driver

    def run(self, call: Call) -> str:
        if call.words[:2] == ("ssm", "start-session") and self.start_session:
            return self.start_session(self.account, call)
        if call.words[:2] == ("sso", "login"):  # The CLI would open a browser.
            return "Successfully logged into Start URL\n"
        out, err = io.StringIO(), io.StringIO()
        # Only the region is the caller's: with other variables a program could reach the real AWS.
        region = {name: call.env[name] for name in ("AWS_REGION", "AWS_DEFAULT_REGION") if call.env.get(name)}
        env = {**self.account.environment, **region}
        config = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
        # Arguments name files relative to the folder of the call.
        with _environment({**env, **config}), _clock(self.account.clock), contextlib.chdir(call.folder), \
                contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.driver.session.set_config_variable("region", None)  # Forgets --region of the call before.
            try:
                # The CLI's own stdout is redirected, that of this process is not.
                words = [str(self.body) if word == "/dev/stdout" else word for word in call.words]
                code = int(self.driver.main(words) or 0)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 2
        if code:
            raise Refusal(f"{out.getvalue()}{err.getvalue()}".strip("\n"), code)
        if call.words[:2] == ("eks", "update-kubeconfig"):
            self._use_cluster(call)
        body = self.body.read_text() if self.body.exists() else ""
        self.body.unlink(missing_ok=True)
        return body + out.getvalue()

    def _use_cluster(self, call: Call) -> None:
        """Make the cluster that `update-kubeconfig` named kubectl's context."""
        flags = dict(pairwise(call.words))
        name = flags.get("--name", "")
        region = next((one for one in (flags.get("--region"), call.env.get("AWS_REGION"),
                                       call.env.get("AWS_DEFAULT_REGION")) if one), HOME_REGION)
        self.account.context = f"{region}/{name}"


_loader = cache(create_loader)  # All sessions share the models that it has read.


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Replace the user's own AWS settings in this process while the CLI runs."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("AWS_") and name != "AWS_DATA_PATH":  # The CLI itself sets it to the folder of its files.
            del os.environ[name]
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _clock(clock: Clock) -> Iterator[None]:
    """Let the CLI's waiters wait by the account's clock."""
    before = botocore.waiter.time
    botocore.waiter.time = SimpleNamespace(sleep=clock.advance)
    try:
        yield
    finally:
        botocore.waiter.time = before
