"""Slurm's compressed lists expand to what Slurm means by them."""

import pytest

from hpcdist.launch.slurm_step import expand

HOSTS = {
    "n1": ["n1"],
    "n[1-3]": ["n1", "n2", "n3"],
    "n[08-11]": ["n08", "n09", "n10", "n11"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "n[1-2,7,9-10]": ["n1", "n2", "n7", "n9", "n10"],
    "login,gpu[3-4],n07": ["login", "gpu3", "gpu4", "n07"],
    "r[1-2]n[01-02]": ["r1n01", "r1n02", "r2n01", "r2n02"],
    "127.0.0.[1-2]": ["127.0.0.1", "127.0.0.2"],
    "node-a.site.org,node-b.site.org": ["node-a.site.org", "node-b.site.org"],
    "n[1-3]-ib0": ["n1-ib0", "n2-ib0", "n3-ib0"],
    "": [],
}


@pytest.mark.parametrize("names", HOSTS)
def test_hosts_are_expanded_in_order(names):
    assert expand(names) == HOSTS[names]


@pytest.mark.parametrize("names", ["n[1-", "n1]", "n[3-1]", "n[a-b]", "n[0-999999999]"])
def test_a_host_list_that_cannot_be_read_is_named_in_the_error(names):
    with pytest.raises(ValueError, match="cannot read the host list") as error:
        expand(names)
    assert repr(names) in str(error.value)
