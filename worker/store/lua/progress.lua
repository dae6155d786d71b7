-- Show how far a running job is, if this execution still holds it and the job was not enqueued again since.
-- ARGV[2]: its progress, as JSON. It is written to the job's hash and deleted with it. `meta` belongs to the producer.
local queue, id, eid = args.queue, args.id, args.eid
local taken_at = holds(queue, id, eid)
if not taken_at or is_queued_again(queue, id, taken_at) then return 0 end
if call('HGET', 'rq:job:' .. id, 'ended_by') == eid then return 0 end -- this call was delayed until after the job's end
call('HSET', 'rq:job:' .. id, 'tokenmill_progress', ARGV[2])
return 1
