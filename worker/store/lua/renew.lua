-- Extend the leases of the jobs that a worker holds, and show which of them have begun.
-- jobs: {queue, job id, execution id, when it began, or '' if Redis shows that already} for each job.
-- Returns the positions (from 1) of the jobs that the worker no longer holds. A lease that ran out unnoticed begins
-- again: nobody else has the job while the execution holds it.
local worker, now_iso, now_ts, lease_s = args.worker, args.now_iso, args.now_ts, args.lease_s
local begun = {}

-- Show a job as running, as RQ does. Its score in rq:wip lies years ahead, where no stock cleanup reaches.
local function show_begun(queue, id, eid, started_iso)
  local job = 'rq:job:' .. id
  if call('HGET', job, 'ended_by') == eid then return end -- this call was delayed until after the job's end
  call('ZADD', 'rq:wip:' .. queue, args.far_score, id .. ':' .. eid)
  begun[#begun + 1] = id .. ':' .. eid
  call(
    'HSET', job, 'status', 'started', 'started_at', started_iso, 'last_heartbeat', now_iso, 'worker_name', worker
  )
end

local function renew(queue, id, eid, started_iso)
  local execution = 'rq:execution:' .. id .. ':' .. eid
  if not holds(queue, id, eid) then return false end
  local num_new = call('HSET', execution, 'id', eid, 'last_heartbeat', now_ts, 'worker_name', worker)
  if num_new > 0 then call('HSETNX', execution, 'created_at', now_ts) end
  call('EXPIRE', execution, lease_s)
  if started_iso ~= '' then
    show_begun(queue, id, eid, started_iso)
  elseif call('ZSCORE', 'rq:wip:' .. queue, id .. ':' .. eid) then
    call('HSET', 'rq:job:' .. id, 'last_heartbeat', now_iso)
  end
  return true
end

local lost = {}
for i, job in ipairs(args.jobs) do
  local queue, id, eid, started_iso = unpack(job)
  local could, is_ours = tried(renew, queue, id, eid, started_iso)
  if not (could and is_ours) then -- cancelled, deleted, damaged or held by another worker
    tried(let_go_of_lost, queue, id, eid)
    lost[#lost + 1] = i
  end
end
if begun[1] then
  local executions = 'rq:worker:' .. worker .. ':executions'
  for i = 1, #begun, 1000 do call('SADD', executions, unpack(begun, i, math.min(i + 999, #begun))) end
  call('EXPIRE', executions, lease_s) -- until the worker's next heartbeat keeps it
end
return lost
