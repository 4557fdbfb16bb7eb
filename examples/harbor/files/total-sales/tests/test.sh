#!/bin/bash
reward=0
if [ "$(tr -d '[:space:]' < total.txt)" = 50 ]; then
    reward=1
fi
echo $reward > /logs/verifier/reward.txt
