"""Slurm's compressed lists expand to what Slurm means by them."""

import pytest

from hpcdist.launch import hostlist

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
TASKS = {
    "1": [1],
    "16": [16],
    "2(x3),1": [2, 2, 2, 1],
    "4,2(x2),3": [4, 2, 2, 3],
    "32(x128)": [32] * 128,
}


@pytest.mark.parametrize("names", HOSTS)
def test_hosts_are_expanded_in_order(names):
    assert hostlist.expand(names) == HOSTS[names]


@pytest.mark.parametrize("names", ["n[1-", "n1]", "n[3-1]", "n[a-b]", "n[0-999999999]"])
def test_a_host_list_that_cannot_be_read_is_named_in_the_error(names):
    with pytest.raises(ValueError, match="cannot read the host list") as error:
        hostlist.expand(names)
    assert repr(names) in str(error.value)


@pytest.mark.parametrize("text", TASKS)
def test_tasks_per_node_are_expanded(text):
    assert hostlist.expand_tasks(text) == TASKS[text]


@pytest.mark.parametrize("text", ["", "two", "2(x", "2x3", "1,,2", "-1"])
def test_tasks_per_node_that_cannot_be_read_are_named_in_the_error(text):
    with pytest.raises(ValueError, match="cannot read the tasks per node") as error:
        hostlist.expand_tasks(text)
    assert repr(text) in str(error.value)


def test_block_fills_one_node_after_the_other():
    assert hostlist.host_of_each_rank("n[09-11]", "2(x2),1") == ["n09", "n09", "n10", "n10", "n11"]


def test_cyclic_goes_round_and_leaves_out_the_nodes_that_are_full():
    hosts = hostlist.host_of_each_rank("a,b,c", "1,3,2", "cyclic")
    assert hosts == ["a", "b", "c", "b", "c", "b"]


@pytest.mark.parametrize("distribution", ["block", "block:cyclic", "block,Pack", "Block:Block"])
def test_what_orders_within_a_node_changes_no_host(distribution):
    assert hostlist.host_of_each_rank("a,b", "2,1", distribution) == ["a", "a", "b"]


@pytest.mark.parametrize("distribution", ["plane=2", "arbitrary", ""])
def test_other_distributions_are_refused_and_the_known_ones_named(distribution):
    with pytest.raises(ValueError, match="known: block, cyclic"):
        hostlist.host_of_each_rank("a,b", "2,1", distribution)


def test_lists_of_different_steps_are_refused():
    with pytest.raises(ValueError, match=r"3 hosts.*for 2.*same step"):
        hostlist.host_of_each_rank("n[1-3]", "4(x2)")


def test_an_empty_step_has_no_ranks():
    assert hostlist.host_of_each_rank("n1", "0", "cyclic") == []
