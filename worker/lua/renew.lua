-- Extend the leases of the jobs that a worker holds, and tell which it holds no longer.
-- ARGV: worker, now_iso, now_ts, lease_s, then queue, job id, execution id for each
-- Returns the positions (from 1) of the lost ones. A lease that ran out unnoticed is taken up again:
-- while the execution holds the job nobody else has it.
local worker, now_iso, now_ts, lease_s = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local function renew(queue, id, eid)
  local execution = 'rq:execution:' .. id .. ':' .. eid
  if not holds(queue, id, eid) then return false end
  redis.call('HSET', execution, 'id', eid, 'last_heartbeat', now_ts, 'worker_name', worker)
  redis.call('HSETNX', execution, 'created_at', now_ts)
  redis.call('EXPIRE', execution, lease_s)
  redis.call('HSET', 'rq:job:' .. id, 'last_heartbeat', now_iso)
  return true
end

local lost = {}
for i = 5, #ARGV, 3 do
  local queue, id, eid = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if not guarded(renew, queue, id, eid) then -- cancelled, deleted, damaged or given to another worker
    let_go(queue, id, eid)
    lost[#lost + 1] = (i - 5) / 3 + 1
  end
end
return lost
