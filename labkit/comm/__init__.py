"""Communication between ranks: ``Comm``, its transports, the status board, deadlock reports.

comm               the operations of a rank: send, recv, exchange, barrier
session            posts each operation on the board and records its span
sent               counts messages and bytes, where they leave
transport          the interface of what moves the bytes; torch_transport, shared_transport
                   (channels, shared_memory, waiting) and cuda_ipc implement it
emulated_link      makes messages as slow as on a link with a given latency and bandwidth
sub_comm           some of the ranks, numbered anew, for a collective among these only
under_way          an exchange that goes on while its rank does something else
span_sums          seconds by kind on the board, for what is shown while ranks run
board              what every rank is doing, for all processes of a run to read
deadlock, explain  which ranks can never continue, and the sentence that says why
mismatch           whether both ends of a message agree
memory_overlap     whether tensors share memory
peak_memory        the most memory that a rank took
any_source         receiving from whichever rank sends first
work, work_queue   operations that go on in a separate thread
meeting            how ranks without a common launcher share memory
tensors, processes, source_lines   what the above need to know of tensors, processes and lines
"""
