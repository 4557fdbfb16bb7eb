#!/bin/bash
cat logs/*.log | grep -c ^ERROR > count.txt
