#!/bin/bash
# 1 if the last number in answer.txt is the expected one
reward=0
if [ "$(grep -oE '[0-9]+' answer.txt | tail -n 1)" = "$(cat /tests/expected.txt)" ]; then
    reward=1
fi
echo $reward > /logs/verifier/reward.txt
