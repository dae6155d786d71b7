-- Shared head of claim.lua and release.lua: `open_execution` makes this worker the holder of a job.
-- The lease is the time to live of the execution hash; only release.lua acts on its end. Until the job begins
-- (renew.lua), it looks as it did in the queue.
-- deaths, journal, pieces: what deaths_and_journal and pieces_of return. They are called if these are not given.
local function open_execution(queue, id, eid, deaths, journal, pieces)
  local job = 'rq:job:' .. id
  local execution = 'rq:execution:' .. id .. ':' .. eid
  local executions = 'rq:executions:' .. id
  -- If the job was enqueued again while it was held, the earlier execution holds it no longer (see holding.lua).
  call('DEL', executions)
  call('HSET', execution, 'id', eid, 'job_id', id, 'created_at', args.now_ts,
    'last_heartbeat', args.now_ts, 'worker_name', args.worker)
  call('EXPIRE', execution, args.lease_s)
  call('ZADD', executions, args.far_score, eid)
  write_claim(queue, id, eid)
  -- A job's ttl bounds its time in the queue, not its run.
  call('PERSIST', job)
  call('HDEL', job, 'tokenmill_progress') -- it belongs to an earlier execution
  if not deaths then
    deaths, journal = deaths_and_journal(id)
    pieces = pieces_of(id)
  end
  return {id, eid, job_hash(id), deaths, '', journal, pieces}
end
