-- Extend the leases of the jobs that a worker holds, and tell which it holds no longer.
-- ARGV: worker, now_iso, now_ts, lease_s, then queue, job id, execution id for each
-- Returns the positions (from 1) of the lost ones. A lease that ran out unnoticed is taken up again:
-- while the member is in rq:wip nobody else has the job.
local worker, now_iso, now_ts, lease_s = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lost = {}
for i = 5, #ARGV, 3 do
  local queue, id, eid = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local job, execution = 'rq:job:' .. id, 'rq:execution:' .. id .. ':' .. eid
  local member = id .. ':' .. eid
  local held = redis.call('ZSCORE', 'rq:wip:' .. queue, member)
  local running = redis.call('HGET', job, 'status') == 'started' or redis.call('HGET', job, 'ended_by') == eid
  if held and running then
    redis.call('HSET', execution, 'id', eid, 'last_heartbeat', now_ts, 'worker_name', worker)
    redis.call('HSETNX', execution, 'created_at', now_ts)
    redis.call('EXPIRE', execution, lease_s)
    redis.call('HSET', job, 'last_heartbeat', now_iso)
  else
    -- Cancelled, deleted or given to another worker: leave nothing of ours behind.
    redis.call('DEL', execution)
    redis.call('ZREM', 'rq:wip:' .. queue, member)
    redis.call('ZREM', 'rq:executions:' .. id, eid)
    lost[#lost + 1] = (i - 5) / 3 + 1
  end
end
return lost
