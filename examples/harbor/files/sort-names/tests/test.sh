#!/bin/bash
reward=0
if cmp sorted.txt /tests/expected.txt; then
    reward=1
fi
echo $reward > /logs/verifier/reward.txt
