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
    "n[3]": ["n3"],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[1,01,001]": ["n1", "n01", "n001"],
    "r[1-2]c[0-1]s[08,10]": ["r1c0s08", "r1c0s10", "r1c1s08", "r1c1s10", "r2c0s08", "r2c0s10", "r2c1s08", "r2c1s10"],
    "n[1-2],n[2-3],n2": ["n1", "n2", "n2", "n3", "n2"],
    "a[1-2]b,c-[3-4].site.org,3-1": ["a1b", "a2b", "c-3.site.org", "c-4.site.org", "3-1"],
    "": [],
}
WRONG = [
    *("n[1-", "n1]", "n[3-1]", "n[a-b]", "n[0-999999999]", "n[]", "n[1,]", "n[,1]", "n[1--2]", "n[-1]", "n,,m", "n, m"),
    *(",", "n[1-[2-3]]", "n[[1-2]]", "n[1-2]]", "n[1-2,m", "n[0-999]m[0-999]", "n[1-2-3]"),
]


@pytest.mark.parametrize("names", HOSTS)
def test_hosts_are_expanded_in_order(names):
    assert expand(names) == HOSTS[names]


@pytest.mark.parametrize("names", WRONG)
def test_a_host_list_that_cannot_be_read_is_named_in_the_error(names):
    with pytest.raises(ValueError, match="cannot read the host list") as error:
        expand(names)
    assert repr(names) in str(error.value)
