#!/bin/bash
echo 18 > answer.txt
