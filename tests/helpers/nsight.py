"""Tables as Nsight Compute prints them."""

RAW = """==PROF== Connected to process 42
"ID","Process ID","Kernel Name","gpu__time_duration.sum",\
"sm__throughput.avg.pct_of_peak_sustained_elapsed","dram__bytes.sum.per_second",\
"dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",\
"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",\
"launch__registers_per_thread"
"","","","ns","%","byte/second","%","%","%","inst","inst","register/thread"
"0","42","delta","1,000","5","1,000,000,000","2","n/a","","0.5","0.1","32"
"1","42","attend","300,000","80","2,000,000,000,000","40","70","60","1.5","2.5","168"
"2","42","attend","100,000","40","1,000,000,000,000","20","30","60","1.5","0.5","168"
"""
DETAILS = """"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value",\
"Rule Name","Rule Type","Rule Description"
"0","attend","GPU Speed Of Light Throughput","DRAM Throughput","%","35.00","","",""
"0","attend","Memory Workload Analysis","L2 Hit Rate","%","88.10","","",""
"0","attend","Compute Workload Analysis","SM Busy","%","77.00","","",""
"0","attend","Warp State Statistics","","","","WarpRule","OPT","Warps wait for a barrier."
"1","delta","Memory Workload Analysis","L2 Hit Rate","%","12.00","","",""
"""
