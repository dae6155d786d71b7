-- Show how far a running job is, if this execution still holds it, and the job was not enqueued again since.
-- ARGV[2]: its progress, as JSON. It is in the job's hash, and goes with it; `meta` is the producer's.
local queue, id, eid = args.queue, args.id, args.eid
local taken_at = holds(queue, id, eid)
if not taken_at or is_queued_again(queue, id, taken_at) then return 0 end
if call('HGET', 'rq:job:' .. id, 'ended_by') == eid then return 0 end -- held up on its way, until after the end
call('HSET', 'rq:job:' .. id, 'tokenmill_progress', ARGV[2])
return 1
