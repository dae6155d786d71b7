-- Take a job from its holder and put it at the head of its queue, or behind the job `left_before` ('' for none).
-- mode: 'given_back', 'engine_died', 'fault' or 'abandoned'. kind: 'function', 'file', or '' if that is not known.
-- Returns
--   {'queued', deaths, worker}; deaths is 0 if the job is merely given back. worker: the one on which the job had
--   begun, '' if it had not;
--   {'alive', 0} if the job is 'abandoned' but its lease still runs;
--   {'gone', 0} if its holder has let go of it;
--   {'dropped', 0} if the job was cancelled, deleted or enqueued again;
--   {'exhausted', deaths, claimed, worker} if max_deaths workers have died with it. The caller holds it now, by the
--   execution `new_eid`, to fail it;
--   {'ended', 0, claimed} if its end is written. The caller holds it now, by the same execution, to queue dependents.
local queue, id, eid, mode, left_before = args.queue, args.id, args.eid, args.mode, args.left_before
local job = 'rq:job:' .. id
local execution = 'rq:execution:' .. id .. ':' .. eid

if not is_open(queue, id, eid) then return {'gone', 0} end
if mode == 'abandoned' and call('TTL', execution) >= 0 then return {'alive', 0} end -- the lease still runs
local taken_at = holds(queue, id, eid)
if not taken_at then
  let_go_of_lost(queue, id, eid)
  return {'dropped', 0}
end
local ended_by, ttl, status, worker_name = unpack(call('HMGET', job, 'ended_by', 'ttl', 'status', 'worker_name'))
local worker = status == 'started' and worker_name or ''
if ended_by == eid then
  call('HSET', execution, 'id', eid, 'created_at', args.now_ts, 'last_heartbeat', args.now_ts, 'worker_name', args.worker)
  call('EXPIRE', execution, args.lease_s)
  return {'ended', 0, {id, eid, job_hash(id), 0, '', false, {}}}
end
local is_queued = is_queued_again(queue, id, taken_at)
let_go(queue, id, eid)
if is_queued then return {'dropped', 0} end

local is_death = mode ~= 'given_back'
local deaths = deaths_and_journal(id) + (is_death and 1 or 0)
if is_death then call('SET', 'tokenmill:deaths:' .. id, deaths, 'EX', 604800) end
if is_death and deaths >= args.max_deaths then
  call('DEL', 'tokenmill:deaths:' .. id)
  return {'exhausted', deaths, open_execution(queue, id, args.new_eid), worker}
end
call('HSET', job, 'status', 'queued', 'started_at', '', 'worker_name', '')
if args.kind ~= '' then call('HSET', job, 'tokenmill_kind', args.kind) end
expire_in_queue(job, ttl)
call('SADD', 'rq:queues', 'rq:queue:' .. queue)
if left_before == '' or call('LINSERT', 'rq:queue:' .. queue, 'AFTER', left_before, id) < 1 then
  call('LPUSH', 'rq:queue:' .. queue, id)
end
return {'queued', is_death and deaths or 0, worker}
