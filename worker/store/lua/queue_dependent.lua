-- Queue a job whose dependencies are met, unless whoever ended another of them has done so.
-- ended_id: of the job it waited for. at_front: whether it is put first.
local queue, id = args.queue, args.id
local job = 'rq:job:' .. id
call('SREM', 'rq:job:' .. args.ended_id .. ':dependents', id)
if call('EXISTS', job) == 0 then return 0 end
if call('HGET', job, 'status') == 'canceled' and call('ZSCORE', 'rq:canceled:' .. queue, id) then return 0 end
-- Who takes it from there has its turn: its status may be that of a copy that somebody saved.
if call('ZREM', 'rq:deferred:' .. queue, id) == 0 then return 0 end
enqueue(queue, id, args.at_front, args.now_iso, args.now_ts)
return 1
