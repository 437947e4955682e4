"""Ranks on an emulated network: their text, and gradients that take a given time there."""

from __future__ import annotations

import os

import pytest

from workbench.clusters.emulated.check import PAYLOAD
from workbench.collectives import native_bytes
from workbench.errors import ConfigError
from workbench.papers.studies.wires import Wire, mlp_of_size

pytestmark = pytest.mark.notebooks


@pytest.mark.parametrize("text", ["gloo", "gloo:0", "nccl:2", "gloo:2:fast", "gloo:2x0:100", "gloo:2:-1"])
def test_a_text_that_is_no_wire_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write LIBRARY:HOSTS:MBIT"):
        Wire.parse(text)


def test_ranks_of_a_host_share_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire.parse("MPI:2x2:1000")
    assert (wire.num_ranks, wire.hosts, wire.ranks_per_host) == (4, 2, 2)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert wire.launcher == "emulated:1000mbit,burst=1ms,ranks-per-host=2"
    assert Wire.parse("gloo:3").launcher == "local"


def test_a_finding_says_where_ranks_slept_also_if_the_network_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert Wire.parse("gloo:2:100").where_slept == "emulated network, slept compute"
    assert Wire.parse("gloo:2").where_slept == "local ranks, slept compute"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert Wire.parse("gloo:2:100").where_slept == "local ranks, slept compute"


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_the_gradient_takes_the_wanted_time_on_the_wire(hosts: int) -> None:
    wire = Wire(library="gloo", hosts=hosts, mbit=100)
    sent = native_bytes(hosts, int(wire.megabytes(0.02) * 1e6))
    assert sent / PAYLOAD * 8 / 100e6 == pytest.approx(0.02, rel=1e-4), "frames have headers"


@pytest.mark.parametrize("megabytes", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("data", ["digits", "mnist1d"])
def test_layers_are_equally_wide_and_the_gradient_has_the_wanted_size(data: str, megabytes: float) -> None:
    model = mlp_of_size(megabytes, data=data, layers=4).model()
    assert 4e-6 * sum(weight.numel() for weight in model.parameters()) == pytest.approx(megabytes, rel=0.03)
    widths = {weight.shape[0] for weight in model.parameters()} - {10}
    assert len(widths) == 1


def test_other_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="mnist1d"):
        mlp_of_size(1.0, data="mnist")
