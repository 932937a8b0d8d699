"""One command for each published table of the two papers that reread implements.

python -m benchmarks.paper list
python -m benchmarks.paper sfi-longbench-v2 --model FOLDER_OR_ID --out DIR
"""
